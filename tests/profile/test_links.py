from distca.profile.links import measure_links
from distca.testing.ranks import run_ranks


def test_links_of_three_ranks():
    found = run_ranks(3, measure_links)
    assert found[0] == found[1] == found[2]
    assert [pair["ranks"] for pair in found[0]["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for figures in [*found[0]["pairs"], found[0]["all_to_all"]]:
        assert len(figures["bytes"]) == len(figures["seconds"])
        assert figures["latency_s"] == figures["seconds"][0] > 0
        assert figures["bytes_per_s"] == figures["bytes"][-1] / figures["seconds"][-1]
    assert all(pair["same_node"] for pair in found[0]["pairs"])
