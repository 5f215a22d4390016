"""An encoder on the Hugging Face Hub: its plain folder, and a card with layer, recipe, scores, license and source."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import polars as pl
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from midlayer_encoders.encoder.spec import CardData
from midlayer_encoders.errors import MidlayerError, OptionError, error_summary
from midlayer_encoders.export._comparison import Exported
from midlayer_encoders.frame import check_frame
from midlayer_encoders.tasks import isolated_random, task_label
from midlayer_encoders.validation import check_flag, check_text

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["PUSHED", "HubError", "check_repository", "push_to_hub", "score_results"]

logger = logging.getLogger(__name__)

PUSHED = ("sentence-transformers", "vllm", "tei")
"""Targets whose folder is a plain one, as which alone the hub's card says how to load it."""
_CARD = "README.md"
_LOCAL = "feature-extraction"  # the type of a task that mteb does not know
_CURES = {
    401: " The token is not valid: run `hf auth login`.",
    403: " The token has no right to write there: take one with the role of writing, or another owner.",
    409: " It exists: pass overwrite=True (--overwrite) to upload into it.",
}  # by the status of the hub's answer


class HubError(MidlayerError):
    """The hub did not take an encoder."""


def push_to_hub(
    encoder: LayerEncoder,
    repository: str,
    *,
    exported: Exported | None = None,
    scores: pl.DataFrame | None = None,
    license: str | None = None,  # noqa: A002  (the hub's own word)
    token: str | None = None,
    private: bool | None = None,
    branch: str | None = None,
    overwrite: bool = False,
) -> str:
    """Upload an encoder to the hub with a card that says what it is, and return the address of the commit.

    Args:
        encoder: what to upload, as ``save_pretrained`` writes it.
        repository: ``"owner/name"``; it is created.
        exported: what :func:`export_for` returned for sentence-transformers, vLLM or text-embeddings-inference: the
            files that it wrote are uploaded instead, with a card of the repository, and nothing else in that folder.
        scores: the frame of a sweep with these options; what it holds of this layer becomes results on the card.
        license: of the encoder; by default the one on the card of the model that it was cut from.
        token: with the right to write; by default the one that ``hf auth login`` or ``HF_TOKEN`` set.
        private: whether others do not see the repository.
        branch: to upload to; it is created.
        overwrite: upload into a repository that exists.

    Raises:
        OptionError: a name without its owner, no token, or scores of another model.
        HubError: the hub cannot be reached, or refuses; the message says what it answered.
    """
    check_flag("overwrite", overwrite)
    if exported is not None:
        _check_exported(exported)
    check_repository(repository, token, private=private, overwrite=overwrite)
    data = cast(CardData, encoder.model_card_data)
    source = _source_card(encoder)
    kept = data.scores, data.license, data.terms, data.language, data.made_of
    try:
        data.scores = score_results(encoder, scores) if scores is not None else ()
        data.made_of = next(iter(_listed(source.get("base_model"))), None)
        if not (license or data.license):
            data.terms = _terms(source, data.made_of if encoder.name.startswith("local/") else encoder.name)
        data.license = license or data.license or source.get("license")
        data.language = data.language or _listed(source.get("language"))
        if data.license is None:
            logger.warning("The card of %s names no license. Pass `license` if you know it.", encoder.name)
        with TemporaryDirectory() as scratch:
            home = Path(scratch) / "encoder"
            if exported is None:
                encoder.save_pretrained(str(home))
            else:
                _link(exported, home)
            text = encoder.model_card_text(repository, branch)
            (home / _CARD).write_text(text, encoding="utf8")
            options = {"token": token, "private": private, "revision": branch, "exist_ok": overwrite}
            return _uploaded(encoder, repository, home, options)
    finally:
        data.scores, data.license, data.terms, data.language, data.made_of = kept


def _check_exported(exported: Exported) -> None:
    """Raise unless it is what was written for a target of plain folders, and still there."""
    if not isinstance(exported, Exported) or exported.target not in PUSHED:
        raise OptionError(f"`exported` must be what export_for returned for {', '.join(PUSHED)}, but got {exported!r}.")
    if gone := [name for name in exported.files if not (exported.folder / name).is_file()]:
        raise OptionError(
            f"`exported` must be as it was written, but {exported.folder} has no {gone[0]}: export again."
        )


def _link(exported: Exported, home: Path) -> None:
    """Make a folder of links to what an export wrote, since a folder is uploaded whole; its card is written anew."""
    for name in exported.files:
        if name != _CARD:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).symlink_to((exported.folder / name).resolve())


def check_repository(
    repository: str,
    token: str | None = None,
    argument: str = "repository",
    *,
    private: bool | None = None,
    overwrite: bool = False,
) -> None:
    """Raise unless a name has an owner, there is a token, and the hub would take an upload with it.

    Args:
        repository: as in :func:`push_to_hub`.
        token: likewise.
        argument: that the name was given as.
        private: as in :func:`push_to_hub`.
        overwrite: likewise.
    """
    check_text(argument, repository)
    try:
        validate_repo_id(repository)
    except HFValidationError as reason:
        raise OptionError(f"`{argument}` must be a name on the hub, but got {repository!r}: {reason}") from reason
    if "/" not in repository:
        raise OptionError(f"`{argument}` must name its owner too, as 'owner/{repository}', but got {repository!r}.")
    given = token or get_token()
    if given is None:
        raise OptionError("There is no token of the hub to write with. Run `hf auth login`, set HF_TOKEN, or pass one.")
    if not given.isascii():  # it goes into a header of HTTP, and is never printed
        raise OptionError(
            "`token` must be of ASCII characters alone, but has others. Copy it again, or `hf auth login`."
        )
    try:
        role, there = _asked(HfApi(token=token), repository)
    except Exception as error:
        raise _refusal(error, repository) or error from error
    if role == "read":
        raise HubError(f"Nothing was uploaded to {repository}.{_CURES[403]}")
    if there is not None and not overwrite:
        raise HubError(f"Nothing was uploaded to {repository}.{_CURES[409]}")
    if there is not None and private and not there.private:  # the hub's client would upload there all the same
        raise OptionError(
            f"`private` must be left out for {repository}, which exists and is public. Make it private in its settings "
            "on the hub first, or name another."
        )


def _asked(api: HfApi, repository: str) -> tuple[str | None, ModelInfo | None]:
    """Return what the hub says of a token, its role, and of a repository, ``None`` where there is none."""
    try:
        known = api.whoami().get("auth") or {}  # of a login by OAuth there is no access token
        role = (known.get("accessToken") or {}).get("role")
    except HfHubHTTPError as error:
        if error.response.status_code != 429:  # it answers few times in a while
            raise
        role = None
    try:
        return role, api.model_info(repository)
    except RepositoryNotFoundError:
        return role, None


def score_results(encoder: LayerEncoder, scores: pl.DataFrame) -> list[EvalResult]:
    """Return the scores of an encoder's layer in the frame of a sweep as results of a model card, times 100.

    Args:
        encoder: at one layer.
        scores: tidy; of several recipes, the one that the encoder is asked by.

    Raises:
        OptionError: the frame has no score of this model at this layer.
    """
    check_frame(scores)
    found = scores.filter(pl.col("model") == encoder.name, pl.col("layer") == encoder.layer)
    if "recipe" in scores.columns:
        asked = encoder.options.recipe
        found = found.filter(pl.col("recipe") == (getattr(asked, "name", asked) or "plain"))
    found = found.filter(pl.col("kind").is_in(["score", "confirmed"])).sort("kind")  # mteb's own score first
    found = found.unique("dataset", keep="first", maintain_order=True).sort("dataset")
    if found.is_empty() or encoder.mixture or encoder.tower_layers:
        raise OptionError(
            f"`scores` must hold scores of {encoder.name} at layer {encoder.layer}, but has none: it must be the frame "
            "of a sweep of this model, with this recipe, over this layer."
        )
    return [_result(row) for row in found.iter_rows(named=True)]


def _result(row: dict[str, Any]) -> EvalResult:
    label = task_label(row["dataset"])
    known = _task_metadata(row["dataset"])
    return EvalResult(
        task_type=known.type if known else _LOCAL,
        dataset_type=known.dataset["path"] if known else label,
        dataset_revision=known.dataset.get("revision") if known else None,
        dataset_split=known.eval_splits[0] if known else None,
        dataset_name=f"MTEB {label}" if known else label,
        metric_type=row["name"],
        metric_value=round(100 * row["value"], 2),
    )


def _task_metadata(name: str) -> Any:
    """Return what mteb says of a task; ``None`` of one that is not its own."""
    import mteb

    with isolated_random():  # building a task seeds the global generators
        try:
            return mteb.get_task(name).metadata
        except KeyError:
            return None


def _listed(value: Any) -> list[str]:
    """Return names on a card as a list; YAML reads that of Norwegian, ``no``, as false."""
    names = [value] if isinstance(value, str | bool) else list(value or ())
    return ["no" if one is False else str(one) for one in names]


def _terms(source: dict[str, Any], base: str | None) -> list[tuple[str, str]]:
    """Return name and link of a license that is not one of the hub's; a file beside the card by its address."""
    terms = {key: str(source[key]) for key in ("license_name", "license_link") if source.get(key)}
    link = terms.get("license_link", "://")
    if "://" not in link and base is None:
        del terms["license_link"]
    elif "://" not in link:
        terms["license_link"] = f"https://huggingface.co/{base}/blob/main/{link}"
    return list(terms.items())


def _source_card(encoder: LayerEncoder) -> dict[str, Any]:
    """Return the metadata on the card of the model that was cut; empty where there is none that can be read."""
    own = Path(encoder.source)
    place = str(own / _CARD) if own.is_dir() else encoder.source
    if own.is_dir() and not (own / _CARD).is_file():
        return {}
    try:
        made: dict[str, Any] = ModelCard.load(place, ignore_metadata_errors=True).data.to_dict()
    except Exception as reason:  # no card, one that is no YAML, or no answer: the card is for people to complete
        logger.warning("The card of %s cannot be read (%s).", encoder.name, type(reason).__name__)
        return {}
    return made


def _uploaded(encoder: LayerEncoder, repository: str, folder: Path, options: dict[str, Any]) -> str:
    """Return the address of the commit that holds a folder, or raise with what the hub answered."""
    try:
        return str(encoder.push_to_hub(repository, local_model_path=str(folder), **options))
    except Exception as error:
        # Of a large file the client says that it failed, and why in what that came from.
        reason = error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
        raise _refusal(reason, repository) or error from reason


def _refusal(reason: BaseException, repository: str) -> HubError | None:
    """Return what the hub, or the way to it, refused; ``None`` where an error is none of theirs."""
    if isinstance(reason, HfHubHTTPError):
        status = getattr(reason.response, "status_code", None)
        cure = _CURES.get(status or 0, "")
        told = " ".join((getattr(reason, "server_message", None) or str(reason)).split())[:300]
        return HubError(f"The hub refused {repository} (status {status}: {told}).{cure}")
    if isinstance(reason, OfflineModeIsEnabled):
        return HubError("The hub is switched off here (HF_HUB_OFFLINE=1): unset that, and push again.")
    # Which library the hub's client speaks HTTP with, httpx or httpx2, is its own business.
    if isinstance(reason, OSError) or type(reason).__module__.startswith("httpx"):
        return HubError(
            f"The hub cannot be reached, or broke off ({error_summary(reason)[:200]}). Check the "
            "network and HF_ENDPOINT, and push again, with overwrite=True where the repository was created before that."
        )
    return None
