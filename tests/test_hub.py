"""What a user names as a model: folders, names near one, and the hub asked once."""

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

from nf4linear.hub import NoSuchModel, check_on_hub, local_folder


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """A working folder that holds demo/smollm2 and demo/smollm2-nf4, and a file."""
    for name in ("smollm2", "smollm2-nf4"):
        (tmp_path / "demo" / name).mkdir(parents=True)
    (tmp_path / "demo" / "file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "demo"


def test_folders_and_hub_names(demo):
    assert local_folder("demo/smollm2") == local_folder(demo / "smollm2") == demo / "smollm2"
    assert local_folder("owner/model") is None and local_folder("gpt2") is None
    assert local_folder("demo/llama") is None  # nothing near it: an owner on the hub may have the name of a folder


@pytest.mark.parametrize("name", ["./demo/smollm", "demo/file", "a/b/c", "/nowhere", "../x", "~/no-such-folder"])
def test_paths_are_not_asked_of_the_hub(demo, name):
    with pytest.raises(NoSuchModel, match="is not a folder"):
        local_folder(name)


def test_a_slip_is_told_the_names_near_it(demo):
    with pytest.raises(NoSuchModel, match="near it are demo/smollm2-nf4 and demo/smollm2"):
        local_folder("demo/smolm2-nf4")


def asked(monkeypatch, outcome):
    """Replaces the hub's answer; returns the names it was asked for."""
    names = []

    def model_info(self, name, timeout):
        names.append(name)
        if isinstance(outcome, Exception):
            raise outcome

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    return names


def http_error(status):
    error = HfHubHTTPError.__new__(HfHubHTTPError)
    error.response = SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize("outcome", [None, http_error(503)])
def test_the_hub_is_asked_once(monkeypatch, outcome):
    names = asked(monkeypatch, outcome)
    check_on_hub("owner/model")
    assert names == ["owner/model"]


@pytest.mark.parametrize(
    ("outcome", "text"), [(http_error(404), "no model of that name"), (ConnectionError("no route"), "no route")]
)
def test_a_model_that_cannot_be_had(monkeypatch, outcome, text):
    asked(monkeypatch, outcome)
    with pytest.raises(NoSuchModel, match=f"owner/model: is not a folder, and .*{text}"):
        check_on_hub("owner/model")


def test_a_cached_model_needs_no_network(monkeypatch):
    names = asked(monkeypatch, ConnectionError())
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: "/cache/config.json")
    check_on_hub("owner/model")
    assert names == []
