"""What fine-tuning adds to the ordinary loop: heads, losses and views of the data. There is no loop here."""
