"""Compiled kernels of flash-attn-4 are kept on disk, here with a stand-in for the package."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from distca.attention.flash4 import Flash4Kernel

VARIABLE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


class InMemory:
    """A cache as flash-attn-4 makes it where its variable is not set."""


class OnDisk(InMemory):
    """A cache whose kernels later starts find."""

    LOCK_TIMEOUT_SECONDS = 15

    def __init__(self, name: str) -> None:
        self.name = name


def _forward() -> None: ...
def _backward() -> None: ...
def _without_a_cache() -> None: ...


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Any:
    """flash_attn.cute.interface, imported before its variable was set, as by Megatron-Core."""
    modules: dict[str, Any] = {
        name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute", "cache_utils", "interface")
    }
    cute, caches, made = (modules[name] for name in ("flash_attn.cute", "cache_utils", "interface"))
    cute.cache_utils, cute.interface = caches, made
    caches.JITCache, caches.JITPersistentCache, caches.get_jit_cache = InMemory, OnDisk, OnDisk
    caches.CUTE_DSL_CACHE_ENABLED = False
    made._flash_attn_fwd, made._flash_attn_bwd, made._plain = _forward, _backward, _without_a_cache
    for function in (_forward, _backward):
        monkeypatch.setattr(function, "compile_cache", InMemory(), raising=False)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, modules[name])
    monkeypatch.setattr(OnDisk, "LOCK_TIMEOUT_SECONDS", 15)
    return made


def test_kernels_are_kept_on_disk_also_where_flash_attn_was_imported_before(
    interface: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    Flash4Kernel()
    first = interface._flash_attn_fwd.compile_cache
    Flash4Kernel()  # keeps what the first one has compiled
    assert interface._flash_attn_fwd.compile_cache is first
    caches = {"_flash_attn_fwd": first, "_flash_attn_bwd": interface._flash_attn_bwd.compile_cache}
    assert {name: cache.name for name, cache in caches.items()} == dict(zip(caches, caches, strict=True))
    assert not hasattr(interface._plain, "compile_cache")
    assert OnDisk.LOCK_TIMEOUT_SECONDS > 15


def test_who_wants_no_files_gets_none(interface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    Flash4Kernel()
    assert type(interface._flash_attn_fwd.compile_cache) is InMemory
