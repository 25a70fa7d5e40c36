from distca.words import format_bytes, rename_parameters


def test_format_bytes() -> None:
    texts = [format_bytes(count) for count in (0, 1023, 1536, 2**30, 5 * 2**40, 2**60)]
    assert texts == ["0 B", "1,023 B", "1.5 KiB", "1.0 GiB", "5.0 TiB", "1,048,576.0 TiB"]


def test_only_known_parameters_get_another_name() -> None:
    said = rename_parameters("`gpus` is 3; see `distca simulate` or `nothing`.", {"gpus": "--gpus"}.get)
    assert said == "--gpus is 3; see `distca simulate` or `nothing`."
