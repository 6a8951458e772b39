"""What a user names as a model: a folder here, or a name on the hub. A slip is found before anything is loaded."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ASK_SECONDS = 10


class NoSuchModel(ValueError):
    """Neither a folder nor a name on the hub; the text says which names are near."""


def local_folder(name: str | Path) -> Path | None:
    """The folder that `name` is, or None where it can only be a name on the hub.

    Raises NoSuchModel for what is neither, such as a file, or a path whose last part is misspelt.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(name)) or path.exists():
        raise NoSuchModel(f"{name}: is not a folder; give the folder of a saved model, or a hub name like owner/model")
    if path.parent.name and (near := _near_folders(path)):
        raise NoSuchModel(f"{name}: is not a folder; {near}")
    return None


def no_folder(name: str | Path, wanted: str) -> str:
    """Says that `name` is not a folder, and which are near it, or else what is `wanted`."""
    return f"{name}: is not a folder; {_near_folders(Path(name).expanduser()) or 'give ' + wanted}"


def check_on_hub(name: str) -> None:
    """Ask once, without the minute of retries that a download takes, whether the hub has this model.

    A model in the hub's local cache counts. Raises NoSuchModel with the hub's reason.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=ASK_SECONDS)
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 404):
            return  # a mirror without this question, or a fault of the hub: the download will tell
        reason = "the model hub has no model of that name that you may read"
    except Exception as error:  # no network or offline mode: the hub client's versions have classes of their own
        reason = f"the model hub cannot be asked ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    else:
        return
    raise NoSuchModel(f"{name}: is not a folder, and {reason}")


def _near_folders(path: Path) -> str | None:
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return None
    near = [str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=2)]
    return f"near it {'are' if near[1:] else 'is'} {' and '.join(near)}" if near else None
