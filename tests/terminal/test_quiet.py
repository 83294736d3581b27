"""What libraries print is hidden, and they load without garbage collection."""

import gc
from importlib import import_module

import huggingface_hub.utils as hub
import pytest

from grpo_replay.terminal.quiet import loading_libraries, quiet_libraries


@pytest.mark.parametrize("variable", [None, "1", "0"])
def test_progress_bars_are_hidden_unless_wanted_although_the_hubs_client_is_imported(
    monkeypatch, variable
):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    if variable is not None:
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", variable)
    bars = import_module("huggingface_hub.utils.tqdm")
    monkeypatch.setattr(bars, "HF_HUB_DISABLE_PROGRESS_BARS", None)  # unset as it was imported
    monkeypatch.setattr(bars, "progress_bar_states", {})
    with quiet_libraries():
        assert hub.are_progress_bars_disabled() == (variable != "0")


def test_nothing_is_collected_while_libraries_load_and_collection_goes_on_after():
    with loading_libraries():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), loading_libraries():
        raise ImportError("no such library")
    assert gc.isenabled()
