"""Groups that are not the configuration's, or of ranks in another order, are refused on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.errors import LaunchError
from distca.testing.ranks import run_ranks
from megatron_patches.ranks import world
from tests.megatron_patches import small_cases

SIZES = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
}


def _refusals() -> dict[str, str | None]:
    small_cases.on_cpu()
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    from megatron_patches.ranks.groups import destroy_model_parallel
    from megatron_patches.ranks.world import join_world
    from megatron_patches.support.ranks import check_groups, check_same_frozen, check_same_on_ranks
    from tests.megatron_patches.support.cases import LLAMA, refusal

    def said(config: dict[str, Any], **groups: Any) -> str | None:
        parallel_state.initialize_model_parallel(**groups)
        found = refusal(check_groups, TransformerConfig(**LLAMA, **config))
        parallel_state.destroy_model_parallel()
        return found

    found = {f"groups of 2, {name}": said({}, **{name: 2}) for name in SIZES}
    stages = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    found["configuration of 2 stages"] = said(stages)
    found["as configured"] = said(stages, pipeline_model_parallel_size=2)
    found["context parallelism"] = said({"context_parallel_size": 2}, context_parallel_size=2)
    found["stages first"] = said(stages, pipeline_model_parallel_size=2, order="tp-cp-ep-pp-dp")
    own = TransformerConfig(**LLAMA)
    own.recompute_method = "uniform" if dist.get_rank() == 1 else None
    found["recomputation"] = refusal(check_same_on_ranks, own, {})
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    kinds = {"on one stage": ("embedding",), "on both": ("embedding", "output_layer"), "nowhere": ()}
    for name, parts in kinds.items():
        found[f"frozen {name}"] = refusal(check_same_frozen, _stage_of_tied_model(*parts))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    for name, ranks in {"of two ranks with the same": (0, 2), "of one rank": (0,)}.items():
        found[f"frozen experts {name}"] = refusal(check_same_frozen, _experts(frozen=dist.get_rank() in ranks))
    parallel_state.destroy_model_parallel()
    found["none yet"] = refusal(check_groups, TransformerConfig(**LLAMA))
    try:
        join_world()
    except LaunchError as error:
        found["joined twice"] = f"{error} {error.next_step}"
    destroy_model_parallel()
    return found


def _stage_of_tied_model(*frozen: str) -> Any:
    """A model's embedding or output layer, whichever this rank's stage has."""
    from megatron.core import parallel_state

    table = torch.nn.Embedding(2, 2)
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    parts = {"embedding": torch.nn.ModuleDict({"word_embeddings": table})} if first else {"output_layer": table}
    table.requires_grad_(not parts.keys() & {*frozen})
    model: Any = torch.nn.ModuleDict(parts)
    model.share_embeddings_and_output_weights = True
    return model


def _experts(frozen: bool) -> Any:
    """A model whose only weight is a local expert's."""
    model: Any = torch.nn.Linear(2, 2, bias=False).requires_grad_(not frozen)
    model.weight.allreduce = False
    model.share_embeddings_and_output_weights = False
    return model


def test_groups_that_a_model_would_not_train_with_are_refused() -> None:
    for found in run_ranks(4, _refusals):
        assert found["as configured"] is None and found["context parallelism"] is None
        for name in SIZES:
            assert f"{name} is 1 in the configuration, but Megatron's process groups were made with 2" in str(
                found[f"groups of 2, {name}"]
            )
        assert "pipeline_model_parallel_size is 2 in the configuration, but" in str(found["configuration of 2 stages"])
        assert "leave `order` of parallel_state.initialize_model_parallel at its default" in str(found["stages first"])
        assert str(found["frozen on one stage"]).startswith(
            "embedding.word_embeddings.weight of the first pipeline stage"
        )
        assert found["frozen on both"] is None and found["frozen nowhere"] is None
        assert found["frozen experts of two ranks with the same"] is None
        assert str(found["frozen experts of one rank"]).startswith("weight is frozen on some ranks, and trained on")
        assert str(found["recomputation"]).startswith("recompute_method is 'uniform' on rank 1 and None on rank 0")
        assert "call distca.join_world()" in str(found["none yet"])
        assert "in place of torch.distributed.init_process_group" in str(found["joined twice"])


def test_a_process_that_has_left_its_world_cannot_join_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_left", False)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    world.leave_world()
    with pytest.raises(LaunchError, match="has left its world"):
        world.join_world()


def test_what_ranks_compare_has_no_addresses_and_no_types_of_numbers() -> None:
    from megatron_patches.support.ranks import _in_words

    def made() -> Any:
        return lambda: None

    first, second = made(), made()
    assert first is not second and _in_words([first, 1]) == _in_words((second, np.int64(1)))
    assert _in_words(np.float64(0.5)) == "0.5" and _in_words(torch.bfloat16) == "torch.bfloat16"
    assert _in_words([0, 1]) != _in_words([1, 0]) and _in_words([]) != _in_words(None)
