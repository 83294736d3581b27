"""A hub that cannot be reached is not asked file by file."""

import os

import pytest
from huggingface_hub import constants

from grpo_replay import hub


@pytest.fixture
def asked(monkeypatch):
    """The addresses that are tried. None answers."""
    addresses = []

    def refuse(address, timeout):
        addresses.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.socket, "create_connection", refuse)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.use_cache_without_hub.cache_clear()
    yield addresses
    hub.use_cache_without_hub.cache_clear()


def test_its_cache_is_used_from_the_first_failure_on(asked):
    for _ in range(3):
        hub.use_cache_without_hub()
    assert asked == [("hub.example", 443)]
    assert constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_hub_that_answers_is_used(asked, monkeypatch):
    class Connection:
        def close(self): ...

    monkeypatch.setattr(hub.socket, "create_connection", lambda *_: Connection())
    hub.use_cache_without_hub()
    assert not constants.HF_HUB_OFFLINE


def test_behind_a_proxy_its_name_need_not_resolve(asked, monkeypatch):
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:3128"})
    hub.use_cache_without_hub()
    assert asked == [] and not constants.HF_HUB_OFFLINE
