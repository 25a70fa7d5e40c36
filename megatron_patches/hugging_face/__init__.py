"""Models from Hugging Face folders, and to them."""
