"""What tests of refusals share."""

from distca.errors import SupportError

LLAMA = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "calculate_per_token_loss": True,
    "use_cpu_initialization": True,
}


def refusal(check, *arguments):
    """The sentence with which ``check`` refuses, or None."""
    try:
        check(*arguments)
    except SupportError as error:
        return str(error)
    return None
