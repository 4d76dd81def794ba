"""Misspelt `STACCATO_*` variables: a setting under a wrong name has no effect, so doctor and `up` name the variable."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from gateway.config import Settings
from store.settings import PREFIX

# Settings of runtimes, scheduler, ledger and commands, without the prefix; a test compares the list with the sources.
OF_OTHERS = frozenset(
    """
    ASYNC_SCHEDULING BUILD_HANG_S COMPILED CUDA_FUNCTIONS CUDA_GRAPHS GRAMMAR_CACHE GRAMMAR_COMPILED_MAX GRAMMAR_CPU_S
    GRAMMAR_JOBS GRAMMAR_MEMORY HANG_S HOST_CACHE_FD JOIN_ISSUER JOIN_TOKEN JOIN_TOKEN_FILE JOURNAL KEY
    LOAD_HELPERS MANAGER NAMESPACES NODES_SCALED NODE_ID NODE_RUNTIMES NUMA_NODE PREFIX_CACHE PREFIX_TTL_S PROFILE
    PUBLIC_URL ROLE RUNTIMES_LEAST RUNTIMES_MOST RUNTIME_ID SECRETS SIGNS THREADS TRACES_TO TRANSPORT
    TRANSPORT_ADVERTISE TRANSPORT_BIND TRANSPORT_PLAINTEXT TRANSPORT_PORT TRANSPORT_TLS_CA TRANSPORT_TLS_CERT
    TRANSPORT_TLS_KEY URL
    """.split()
)
# Variables of deploy/compose/compose.yaml.
OF_DEPLOY = frozenset({"JOIN_TOKENS", "SECRET_FILES", "TAG", "TRACES"})


def known() -> frozenset[str]:
    """Names of the variables that a process of the platform or the compose file reads."""
    ours = {name.upper() for name in Settings.model_fields}
    return frozenset(PREFIX + name for name in ours | OF_OTHERS | OF_DEPLOY)


def unknown(environment: Iterable[str]) -> list[str]:
    """A phrase for each variable with the prefix that no process reads: the name, and the name probably meant."""
    there = known()
    return [_phrase(name, there) for name in sorted(environment) if name.startswith(PREFIX) and name not in there]


def _phrase(name: str, there: frozenset[str]) -> str:
    endings = sorted(known.removeprefix(PREFIX) for known in there)
    near = get_close_matches(name.removeprefix(PREFIX), endings, n=1, cutoff=0.75)
    return f"{name} (did you mean {PREFIX}{near[0]}?)" if near else name
