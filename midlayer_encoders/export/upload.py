"""Upload an encoder to the Hugging Face Hub with a model card."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import polars as pl
from huggingface_hub import EvalResult, HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.spec import CardData
from midlayer_encoders.encoder.verification import temporarily
from midlayer_encoders.errors import MidlayerError, OptionError, error_summary
from midlayer_encoders.export._comparison import Exported
from midlayer_encoders.frame.schema import check_frame
from midlayer_encoders.tasks import task_label
from midlayer_encoders.validation import check_flag, check_text

logger = logging.getLogger(__name__)

PUSHED = ("sentence-transformers", "vllm", "tei")
"""Targets whose folders sentence-transformers can load from the Hub."""
_CARD = "README.md"
_ADVICE = {
    401: " The token is invalid: run `hf auth login`.",
    403: " The token has no write permission there: use a token with the write role, or another owner.",
    409: " The repository exists: pass overwrite=True (--overwrite) to upload into it.",
}  # by HTTP status


class HubError(MidlayerError):
    """The Hub rejected an upload or cannot be reached."""


def push_to_hub(
    encoder: LayerEncoder,
    repository: str,
    *,
    exported: Exported | None = None,
    scores: pl.DataFrame | None = None,
    license: str | None = None,  # noqa: A002
    token: str | None = None,
    private: bool | None = None,
    branch: str | None = None,
    overwrite: bool = False,
) -> str:
    """Upload an encoder to the Hub with a model card and return the URL of the commit.

    Args:
        encoder: the encoder, uploaded as ``save_pretrained`` writes it.
        repository: ``"owner/name"``; created if it does not exist.
        exported: the result of :func:`export_for` for sentence-transformers, vLLM or text-embeddings-inference; its
            files are uploaded instead.
        scores: the frame of a sweep with the same options; the scores of this layer become results on the card.
        license: license of the encoder; by default that of the base model.
        token: a token with the write role; by default that of ``hf auth login`` or ``HF_TOKEN``.
        private: make the repository private.
        branch: branch to upload to; created if it does not exist.
        overwrite: upload into an existing repository.

    Raises:
        OptionError: if the name has no owner, there is no token, or the scores belong to another model.
        HubError: if the Hub cannot be reached or rejects the upload; the message contains its response.
    """
    check_flag("overwrite", overwrite)
    if exported is not None and (not isinstance(exported, Exported) or exported.target not in PUSHED):
        raise OptionError(f"`exported` must be the result of export_for for {', '.join(PUSHED)}, but got {exported!r}.")
    if exported is not None and exported.stock:
        raise OptionError(
            "`exported` must not be a stock folder, because the model card describes the encoder. Upload it with: "
            f"hf upload {repository} {shlex.quote(str(exported.folder))}"
        )
    check_repository(repository, token, private=private, overwrite=overwrite)
    data = cast(CardData, encoder.model_card_data)
    source = _source_card(encoder)
    base_model = next(iter(_name_list(source.get("base_model"))), None)
    card: dict[str, Any] = {
        "scores": score_results(encoder, scores) if scores is not None else (),
        "made_of": base_model,
        "license": license or data.license or source.get("license"),
        "language": data.language or _name_list(source.get("language")),
    }
    if not (license or data.license):
        card["terms"] = _license_terms(source, base_model if encoder.name.startswith("local/") else encoder.name)
    if card["license"] is None:
        logger.warning("The model card of %s has no license. Pass `license` if you know it.", encoder.name)
    with temporarily(data, **card), TemporaryDirectory() as scratch:
        folder = Path(scratch) / "encoder"
        if exported is None:
            encoder.save(str(folder))
        else:
            _link_files(exported, folder)
        text = encoder.model_card_text(repository, branch)
        (folder / _CARD).write_text(text, encoding="utf8")
        options = {"token": token, "private": private, "revision": branch, "exist_ok": overwrite}
        with _explain_hub_errors(repository):
            return str(encoder.push_to_hub(repository, local_model_path=str(folder), **options))


def _link_files(exported: Exported, folder: Path) -> None:
    """Fill a folder with links to the exported files except the model card; the Hub client uploads whole folders."""
    root = exported.folder.resolve()
    for name in exported.files:
        source = root / name
        if source.resolve() != source or not source.is_file():
            problem = "is a link" if source.resolve() != source else "does not exist"
            raise OptionError(f"`exported` must be unchanged, but {source} {problem}: export again.")
        if name != _CARD:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(source)


def check_repository(
    repository: str, token: str | None = None, *, private: bool | None = None, overwrite: bool = False
) -> None:
    """Raise an error unless the Hub would accept an upload; the arguments are those of :func:`push_to_hub`."""
    check_text("repository", repository)
    try:
        validate_repo_id(repository)
    except HFValidationError as reason:
        raise OptionError(f"`repository` must be a repository name, but got {repository!r}: {reason}") from reason
    if "/" not in repository:
        raise OptionError(f"`repository` must contain the owner, such as 'owner/{repository}', but got {repository!r}.")
    secret = token or get_token()
    if secret is None:
        raise OptionError("`token` must be a Hub token, but there is none. Run `hf auth login`, or set HF_TOKEN.")
    if not secret.isascii():  # the message must not contain it
        raise OptionError("`token` must contain only ASCII characters. Copy it again, or run `hf auth login`.")
    api = HfApi(token=token)
    auth: dict[str, Any] = {}
    existing = None
    with _explain_hub_errors(repository):
        try:
            auth = api.whoami().get("auth") or {}
        except HfHubHTTPError as error:
            if error.response.status_code != 429:  # rate limit
                raise
        with contextlib.suppress(RepositoryNotFoundError):
            existing = api.model_info(repository)
    if (auth.get("accessToken") or {}).get("role") == "read":  # OAuth logins have no access token
        raise HubError(f"Nothing was uploaded to {repository}.{_ADVICE[403]}")
    if existing is not None and not overwrite:
        raise HubError(f"Nothing was uploaded to {repository}.{_ADVICE[409]}")
    if existing is not None and private and not existing.private:  # the client would ignore `private`
        raise OptionError(
            f"`private` must be left out for {repository}, which exists and is public. Choose another repository."
        )


def score_results(encoder: LayerEncoder, scores: pl.DataFrame) -> list[EvalResult]:
    """Return the scores of an encoder's layer, times 100, as results for a model card.

    Args:
        encoder: an encoder at one layer.
        scores: the frame of a sweep; if it has several recipes, only the rows of the encoder's recipe count.

    Raises:
        OptionError: if the frame has no score of this model at this layer.
    """
    check_frame(scores)
    rows = scores.filter(pl.col("model") == encoder.name, pl.col("layer") == encoder.layer)
    if "recipe" in scores.columns:
        recipe = encoder.options.recipe
        rows = rows.filter(pl.col("recipe") == (getattr(recipe, "name", recipe) or "plain"))
    rows = rows.filter(pl.col("kind").is_in(["score", "confirmed"])).sort("kind")  # mteb's score first
    rows = rows.unique("dataset", keep="first", maintain_order=True).sort("dataset")
    if rows.is_empty() or encoder.tower_layers:
        raise OptionError(f"`scores` must hold scores of {encoder.name} at layer {encoder.layer}, but has none.")
    return [_eval_result(row) for row in rows.iter_rows(named=True)]


def _eval_result(row: dict[str, Any]) -> EvalResult:
    import mteb

    label = task_label(row["dataset"])
    task = {"task_type": "feature-extraction", "dataset_type": label, "dataset_name": label}
    with isolated_random(), contextlib.suppress(KeyError):  # mteb seeds the global generators
        metadata: Any = mteb.get_task(row["dataset"]).metadata
        task = {"task_type": metadata.type, "dataset_type": metadata.dataset["path"], "dataset_name": f"MTEB {label}"}
        task |= {"dataset_revision": metadata.dataset.get("revision"), "dataset_split": metadata.eval_splits[0]}
    return EvalResult(metric_type=row["name"], metric_value=round(100 * row["value"], 2), **task)


def _name_list(value: Any) -> list[str]:
    """Return the names in a card field as a list; YAML parses ``no`` (Norwegian) as false."""
    names = value if isinstance(value, list) else [value]
    return ["no" if name is False else name for name in names if name is False or isinstance(name, str)]


def _license_terms(source: dict[str, Any], base: str | None) -> list[tuple[str, str]]:
    """Return the name and link of a custom license; a relative link is resolved against the base model."""
    terms = {key: str(source[key]) for key in ("license_name", "license_link") if source.get(key)}
    link = terms.get("license_link", "://")
    if "://" not in link and base is None:
        del terms["license_link"]
    elif "://" not in link:
        terms["license_link"] = f"https://huggingface.co/{base}/blob/main/{link}"
    return list(terms.items())


def _source_card(encoder: LayerEncoder) -> dict[str, Any]:
    """Return the metadata of the base model's card, or an empty dict if it cannot be read."""
    folder = Path(encoder.source)
    source = str(folder / _CARD) if folder.is_dir() else encoder.source
    if folder.is_dir() and not (folder / _CARD).is_file():
        return {}
    try:
        metadata: dict[str, Any] = ModelCard.load(source, ignore_metadata_errors=True).data.to_dict()
    except Exception as reason:  # a missing or invalid card does not prevent the upload
        logger.warning("The model card of %s cannot be read (%s).", encoder.name, type(reason).__name__)
        return {}
    return metadata


@contextlib.contextmanager
def _explain_hub_errors(repository: str) -> Iterator[None]:
    """Turn the errors of the Hub's client into a :class:`HubError` with advice."""
    try:
        yield
    except Exception as error:
        # For large files the client wraps the reason in a RuntimeError.
        reason = error.__cause__ if type(error) is RuntimeError and error.__cause__ is not None else error
        if isinstance(reason, HfHubHTTPError):
            status = getattr(reason.response, "status_code", None)
            text = " ".join((getattr(reason, "server_message", None) or str(reason)).split())[:300]
            message = f"The Hub rejected {repository} (status {status}: {text}).{_ADVICE.get(status or 0, '')}"
        elif isinstance(reason, OfflineModeIsEnabled):
            message = "The Hub is disabled (HF_HUB_OFFLINE=1): unset the variable and push again."
        elif isinstance(reason, OSError) or type(reason).__module__.startswith("httpx"):  # httpx or httpx2
            message = (
                f"The Hub cannot be reached or closed the connection ({error_summary(reason)[:200]}). Check the "
                "network and HF_ENDPOINT, and push again, with overwrite=True if the repository was created."
            )
        else:
            raise
        raise HubError(message) from reason
