"""Models as folders of Hugging Face: what config.json says, and the tensors of its safetensors files."""
