"""One settings model, filled from defaults, a recipe, environment variables and the command line."""
