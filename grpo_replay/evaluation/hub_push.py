"""Push of an evaluated model to the Hugging Face hub, in one commit, private unless asked."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, is_offline_mode
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from grpo_replay.errors import HubError, UsageError, first_line
from grpo_replay.evaluation.model_source import ModelSource, model_files

CARD = "README.md"
ADAPTER = "adapter"
_FAILURES = (HTTPError, OSError, ValueError, RuntimeError)
"""What huggingface_hub raises: refusals, no network, a malformed answer, a failed upload."""


@dataclass(frozen=True, slots=True)
class HubPush:
    """What is pushed where. `files` are paths or contents by their name in the repository; `public`
    is for a repository that does not exist yet, and permits a public one that does."""

    repo_id: str
    public: bool
    files: dict[str, Path | bytes]

    def sizes(self) -> dict[str, int]:
        """Size of each file in bytes, by its name in the repository."""
        return {
            name: len(file) if isinstance(file, bytes) else file.stat().st_size
            for name, file in self.files.items()
        }


def check_push(repo_id: str, source: ModelSource) -> None:
    """Refuse, before anything is sampled, a push that cannot succeed.

    Raises UsageError for a name that no repository has or a model that is not in a local folder,
    and, unless offline, HubError without a valid token or without a connection.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(f"--push-to-hub {repo_id}: {first_line(error)}") from error
    if "/" not in repo_id:
        raise UsageError(f"--push-to-hub {repo_id}: name the repository as OWNER/NAME")
    if not Path(source.path).is_dir():
        raise UsageError(
            f"--push-to-hub uploads the folder of a checkpoint, a run or a model; --ckpt "
            f"{source.path} is none"
        )
    if is_offline_mode():
        return
    try:
        HfApi().whoami()
    except _FAILURES as error:
        raise HubError(_reason(error, repo_id)) from error


def planned_push(source: ModelSource, repo_id: str, public: bool, card: str) -> HubPush:
    """The card, the files of the model, and the LoRA adapters of a checkpoint under `adapter/`."""
    model = Path(source.path)
    files: dict[str, Path | bytes] = {CARD: card.encode()}
    files |= {file.name: file for file in model_files(model)}
    adapters = model.parent / ADAPTER
    if source.step is not None and adapters.is_dir():
        kept = [file for file in sorted(adapters.iterdir()) if file.name != CARD]
        files |= {f"{ADAPTER}/{file.name}": file for file in kept}
    return HubPush(repo_id, public, files)


def upload(push: HubPush, message: str) -> str:
    """Create the repository if there is none, upload the files as one commit, and return the URL of
    the repository. Raises HubError."""
    api = HfApi()
    try:
        url = api.create_repo(push.repo_id, private=not push.public, exist_ok=True)
        if not push.public and not api.model_info(push.repo_id).private:
            raise HubError(
                f"{url} exists and is public: add --public to push there, or choose another name"
            )
        operations = [
            CommitOperationAdd(name, file if isinstance(file, bytes) else str(file))
            for name, file in push.files.items()
        ]
        api.create_commit(push.repo_id, operations, commit_message=message)
    except _FAILURES as error:
        raise HubError(_reason(error, push.repo_id)) from error
    return str(url)


def _reason(error: BaseException, repo_id: str) -> str:
    """What went wrong and what to do."""
    hub, owner = HfApi().endpoint, repo_id.partition("/")[0]
    login = "run `hf auth login`, or set HF_TOKEN, with a token that may write"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, LocalTokenNotFoundError):
        reason = f"there is no token for {hub}: {login}"
    elif status == 401:
        reason = f"{hub} does not accept the token: {login}"
    elif status in (403, 404):
        reason = (
            f"the token may not write there ({_words(error)}): use one with write access to "
            f"{owner}, or name a repository of your own"
        )
    elif isinstance(error, HTTPError | ConnectionError | TimeoutError) and status is None:
        reason = (
            f"{hub} cannot be reached ({_words(error)}): check the network and HF_ENDPOINT; with "
            "HF_HUB_OFFLINE=1 the command says what it would push"
        )
    else:
        reason = f"{hub} did not take the push ({_words(error)})"
    return f"--push-to-hub {repo_id}: {reason}"


def _words(error: BaseException) -> str:
    """The hub's own message, else the first line of the error and of its cause."""
    if isinstance(error, HfHubHTTPError) and error.server_message:
        return error.server_message
    cause = f" {first_line(error.__cause__)}" if error.__cause__ is not None else ""
    return first_line(error) + cause
