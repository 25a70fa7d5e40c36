"""Reading and writing of Megatron models as Hugging Face folders."""
