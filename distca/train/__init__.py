"""A training run: its typed configuration, its loop, its checkpoints and what a person looks at afterwards."""
