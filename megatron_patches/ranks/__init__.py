"""This process among the ranks: torch.distributed, process groups, and servers without a model."""
