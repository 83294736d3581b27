"""Switch a server to new weights, staged as files. It is used again only after it has confirmed the
label of the new policy version.
"""

from grpo_replay.sampling.server.routes import UPDATING, Refused, Unreachable, VllmServer, block_on

WAY_OUT = (
    "the server must see the adapter's folder (sampling.servers.weight_transfer); with "
    "sampling.lora merged it gets whole weights instead"
)


def switch_server(
    server: VllmServer, folder: str | None, version: int, timeout_seconds: float
) -> str | None:
    """Bring a server the weights in `folder` (None: it has them), or its adapter, and set its
    label. Returns why it did not confirm the label, or None.

    For weights it is paused, and its prefix cache emptied. The label is "updating" in between: a
    server that fails half-way must not be used as the old version or as the new one. An adapter is
    for the requests that name it, so that those that run go on.
    """
    label = server.label(version)
    try:
        if server.with_adapters:
            assert folder is not None, "adapters are staged for every version"
            server.load_adapter(label, folder, timeout_seconds)
            server.set_weight_label(label)
        else:
            load_weights(server, folder, timeout_seconds)
            server.set_weight_label(label)
            server.resume()
        confirmed = block_on(server.weight_label())
    except (Refused, Unreachable) as error:
        refused = isinstance(error, Refused) and server.with_adapters
        more = f"; {WAY_OUT}" if refused else ""
        return f"it did not take policy version {version}: {error}{more}"
    return None if confirmed == label else f"it confirmed {confirmed!r} instead of {label!r}"


def load_weights(server: VllmServer, folder: str | None, timeout_seconds: float) -> None:
    """Pause a server and let it load the weights in `folder`, if they are not there. Raises
    Refused, Unreachable."""
    server.pause(timeout_seconds)
    server.set_weight_label(server.prefix + UPDATING)
    if folder is not None:
        server.reload_weights(folder, timeout_seconds)
    if not server.drop_cached_prompts():
        raise Unreachable("its prompt cache could not be emptied")
