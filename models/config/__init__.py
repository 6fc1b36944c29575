"""What a model is: its configuration, named ones, and the config.json files of Hugging Face."""
