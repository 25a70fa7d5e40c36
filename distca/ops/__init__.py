"""Operations of a transformer in torch and Triton; no Megatron."""
