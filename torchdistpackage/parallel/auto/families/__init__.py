"""Plans for families of Hugging Face models, one a file."""
