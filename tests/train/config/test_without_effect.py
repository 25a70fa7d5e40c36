import pytest

from distca.train.config.cli import parse_run_config
from distca.train.config.without_effect import without_effect


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", None),
        ("--cad.kernel reference --cad.deterministic true --cad.cost_table a.json", None),
        ("--cad.nvshmem_buffer_gb 2 --cad.transport nvshmem", "cad.transport nvshmem, cad.nvshmem_buffer_gb 2.0"),
        (
            "--cad.backward resend --cad.ranks_per_node 2 --cad.tolerance 0.1 --cad.ping_pong false",
            "cad.ping_pong false, cad.backward resend, cad.tolerance 0.1, cad.ranks_per_node 2",
        ),
    ],
)
def test_what_only_disaggregation_uses_is_named(line: str, said: str | None) -> None:
    assert without_effect(parse_run_config(line.split())) is None
    found = without_effect(parse_run_config([*line.split(), "--cad.enabled", "false"]))
    assert found == (said and f"Without effect, because cad.enabled is false: {said}")
