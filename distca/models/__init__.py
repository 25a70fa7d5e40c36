"""Models as data: their shape, the bytes that a rank holds of them, and the Hugging Face folders that have them."""
