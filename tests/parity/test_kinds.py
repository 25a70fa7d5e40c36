"""What the matrix of kinds of layers holds; ``distca parity --kinds true`` runs it."""

import json


def test_the_matrix_has_every_kind_documents_around_the_window_and_every_mode():
    from distca.commands.parity import _settings
    from distca.parity.kinds import WINDOW, matrix
    from distca.parity.worlds import OF_KINDS

    cases = [case for world in OF_KINDS for case in matrix(world)]
    rows = [_settings(case, "kinds") for case in cases]
    assert json.loads(json.dumps(rows)), "all that tells cases apart can be written"
    seen = {name: {json.dumps(row[name]) for row in rows} for name in rows[0]}
    assert seen["backward"] == {'"keep"', '"resend"'} and seen["ping_pong"] == {"true", "false"}
    assert seen["scheduler"] == {'"real"', '"random"'} and seen["offload"] == {"true", "false"}
    assert seen["recompute"] == {'"none"', '"all"', '"mlp"'}
    lengths = {length for row in rows for each in row["documents"] for length in each}
    assert {1, WINDOW - 1, WINDOW, WINDOW + 1} <= lengths
    softmax = {(row["config"].get("softmax_type"), "window_size" in row["config"]) for row in rows}
    assert softmax == {(None, False), ("learnable", False), (None, True), ("learnable", True)}


def test_two_layouts_of_ranks_together_have_every_model_with_every_set_of_documents():
    from distca.parity.kinds import matrix
    from distca.parity.variants import megatron_variants, option_variants
    from distca.parity.worlds import World

    pairs = set()
    for world in (World(4, pp=2), World(8, tp=2, pp=2)):  # of an odd and an even place
        some = matrix(world)
        some = some[: len(some) - len(megatron_variants(1)) - len(option_variants(1))]
        found = {(json.dumps(case.config, sort_keys=True), case.micro_batches) for case in some}
        assert len(found) == len(some) == 27
        pairs |= found
    assert len(pairs) == 54
