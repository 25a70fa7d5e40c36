"""Models in and out of Hugging Face folders."""
