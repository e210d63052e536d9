"""What one request asks of the cache: `kv_transfer_params={"kvcairn": {...}}` in its sampling parameters."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvcairn.types import Hints

logger = logging.getLogger(__name__)

NAME = "kvcairn"


class Controls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Controls of one request.

    Attributes:
        load: Whether stored blocks are loaded for it.
        store: Whether its blocks are stored.
        store_generated: Whether those of generated tokens are; the engine's setting unless given.
        max_load_tokens: Most tokens that are loaded for it.
        priority: Hint: 0 (first to go) to 100.
        ttl_s: Hint: seconds after which its blocks are misses.
        pin: Hint: keep its blocks from eviction, under a cap.
        session: Hint: id of the conversation; vLLM's own `session_id` unless given.
        ends_session: Hint: this is the last request of the session.
    """

    load: bool = True
    store: bool = True
    store_generated: bool | None = None
    max_load_tokens: Annotated[int, Meta(ge=0)] | None = None
    priority: Annotated[int, Meta(ge=0, le=100)] = 50
    ttl_s: Annotated[float, Meta(ge=0)] | None = None
    pin: bool = False
    session: str | None = None
    ends_session: bool = False

    @property
    def hints(self) -> Hints | None:
        """Return what they say about the future of blocks; None where that is nothing."""
        hints = Hints(
            priority=self.priority,
            ttl_s=self.ttl_s,
            pin=self.pin,
            session=self.session,
            ends_session=self.ends_session,
        )
        return None if hints == Hints() else hints


def read_controls(request: Any, *, loads: bool, saves: bool) -> Controls:
    """Return the controls of a request, within what the engine may do.

    Malformed ones are logged and have no effect: they must not stop the engine.
    """
    given = (request.kv_transfer_params or {}).get(NAME, {})
    try:
        controls = msgspec.convert(given, Controls)
    except msgspec.ValidationError as error:
        logger.warning("request %s: kv_transfer_params[%r] ignored: %s", request.request_id, NAME, error)
        controls = Controls()
    session = controls.session if request.session_id is None else controls.session or str(request.session_id)
    return msgspec.structs.replace(
        controls, session=session, load=controls.load and loads, store=controls.store and saves
    )
