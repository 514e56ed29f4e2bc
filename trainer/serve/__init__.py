"""`serve`: answers programs that speak the API of OpenAI, over HTTP, with the model of a run. Nothing else imports it."""
