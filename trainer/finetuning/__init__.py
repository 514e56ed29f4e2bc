"""What fine-tuning adds to the ordinary loop: initial weights, heads, losses and views of the data. There is no loop here."""
