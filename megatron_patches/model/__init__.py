"""The parts of a model beside its modules: its configuration, its kinds of layers, and options that Megatron has no
field for."""
