"""The card data of an encoder, by which mteb files results: a name and a revision that follow it as it is now."""

from __future__ import annotations

from typing import Any

from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData

from midlayer_encoders.encoder.identity import result_name, result_revision

__all__ = ["CardData"]


class CardData(SentenceTransformerModelCardData):
    """Card data whose name and revision, by which mteb files results, follow the encoder as it is when asked."""

    def _spec(self) -> Any:
        return getattr(self.model, "spec", None)

    @property
    def model_name(self) -> str | None:
        """The model's name and the layer."""
        return result_name(spec) if (spec := self._spec()) is not None else None

    @model_name.setter
    def model_name(self, value: str | None) -> None:
        """Pass over what the base class would store."""

    @property
    def base_model_revision(self) -> str | None:
        """What tells apart encoders that differ in anything else."""
        return result_revision(spec) if (spec := self._spec()) is not None else None

    @base_model_revision.setter
    def base_model_revision(self, value: str | None) -> None:
        """Pass over what the base class would store."""

    @property
    def base_model(self) -> str | None:
        """The name of the model that was cut."""
        return getattr(self.model, "name", None)  # without the spec, which reads every weight

    @base_model.setter
    def base_model(self, value: str | None) -> None:
        """Pass over what the base class would store."""
