"""Configurations of models, and the config.json files of Hugging Face."""
