# SPDX-License-Identifier: Apache-2.0
"""Training on several sites that a slow line connects (docs/many_sites.md): the flags of DiLoCo and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core.config_base import CheckedConfig, flag, name_multiples
from megatron.core.errors import ConfigError
from megatron.core.setting import Needs, PathText

_SITES = Needs("--diloco-replicas of 2 or more", lambda run: run.diloco_replicas > 1)
_SEPARATE = Needs("--datacenter-id", lambda run: run.datacenter_id is not None)
_OVERLAPS = Needs("--diloco-overlap-steps", lambda run: run.diloco_overlap_steps > 0)


@dataclass(kw_only=True)
class SitesConfig(CheckedConfig):
    """Several sites, each of which trains by itself between exchanges of weights."""

    usual_kind = "numerics"

    diloco_replicas: int = flag(1, minimum=1, unit="sites")
    """Train on so many sites by DiLoCo: each takes its part of every global batch and steps by itself, and now and then
    all exchange what they have learnt. Without --datacenter-id, equal blocks of the job's ranks are the sites."""
    datacenter_id: int | None = flag(None, minimum=0, kind="layout", needs=_SITES)
    """Number of the site that this job is, from 0; the others are separate jobs."""
    diloco_backend: Literal["own", "torchft"] = flag("own", kind="layout", needs=(_SITES, _SEPARATE))
    """Exchange between sites that are separate jobs: this project's or the package torchft's, whose lighthouse
    is then at --diloco-address, and which authenticates nothing."""
    diloco_address: str | None = flag(None, kind="layout", metavar="HOST:PORT[,...]", needs=(_SITES, _SEPARATE))
    """Addresses at which the first site listens, and which the others call: one for each of its nodes, separated by
    commas. The ranks of a node use as many ports, from the given one on."""
    diloco_key_file: PathText | None = flag(None, kind="layout", needs=(_SITES, _SEPARATE))
    """File with the key, the same at all sites, that every message between them is signed with."""
    site_topology: PathText | None = flag(None, kind="layout", metavar="FILE")
    """File with a line for each site: the names of its hosts. Ranks must be started in this order, as many at each
    site. Gradients are then summed inside of a site first, and cross between sites as one sum, which is exact; with
    --diloco-replicas it is only compared with the hosts."""
    data_site: list[str] = flag(default_factory=list, nargs="+", kind="layout", metavar="SITE:PREFIX", needs=_SITES)
    """Prefix of the copy of the dataset that a site has, in place of --data-path, as 1:/near/text_document:
    each site reads what is near it. The copies must be equal."""
    diloco_inner_steps: int = flag(
        30, minimum=1, unit="iterations", aliases=("--diloco-sync-interval",),
        needs=_SITES,
    )  # fmt: skip
    """Exchange each weight after so many steps."""
    diloco_outer_lr: float = flag(0.7, above=0.0, needs=_SITES)
    """Learning rate of the outer step, which follows an exchange."""
    diloco_outer_momentum: float = flag(0.9, minimum=0.0, maximum=1.0, needs=_SITES)
    """Nesterov momentum of the outer step."""
    diloco_fragments: int = flag(1, minimum=1, needs=_SITES)
    """Exchange the layers in so many parts, at different times."""
    diloco_overlap_steps: int = flag(0, minimum=0, unit="iterations", needs=_SITES)
    """Go on so many steps while an exchange is under way."""
    diloco_mixing: float = flag(0.0, minimum=0.0, maximum=1.0, needs=_SITES)
    """Fraction of the site's weights in an outer step's result; the rest is the weights that all sites share."""
    diloco_exchange_dtype: Literal["fp32", "bf16", "int8", "e3m0"] = flag("fp32", needs=_SITES)
    """Dtype of what is exchanged. What rounding loses is added to the next exchange."""
    diloco_min_replicas: int = flag(1, minimum=1, unit="sites", needs=_SITES)
    """Make no outer step with fewer sites."""
    diloco_timeout_seconds: float = flag(300.0, above=0.0, unit="seconds", kind="layout", needs=_SITES)
    """Wait so long for the other sites, at an exchange or for their losses."""

    @property
    def sites_of_job(self) -> int:
        """Sites among which the ranks of this job are divided."""
        return self.diloco_replicas if self.datacenter_id is None else 1

    @property
    def outer_bytes(self) -> int:
        """Bytes of outer state of each weight that a process updates."""
        from megatron.core.many_sites.shares import name_outer_state

        few = self.diloco_replicas == 1
        return 0 if few else 4 * len(name_outer_state(self.diloco_exchange_dtype, self.diloco_overlap_steps))

    def read_data_sites(self) -> list[tuple[int, str]]:
        """(site, prefix) of --data-site; site -1 for what has another form."""
        parted = (text.partition(":") for text in self.data_site)
        return [(int(site) if site.isdecimal() and prefix else -1, prefix) for site, _, prefix in parted]

    def rules(self) -> Iterator[str]:
        """Parts of an interval, and of the sites."""
        steps, parts, sites = self.diloco_inner_steps, self.diloco_fragments, self.diloco_replicas
        if steps % parts:
            yield (
                f"{self.say('diloco_inner_steps')} is not divisible by {self.say('diloco_fragments')}, whose exchanges "
                f"are spread over it evenly; use {name_multiples(steps, parts)} steps"
            )
        elif self.diloco_overlap_steps >= steps // parts:
            yield (
                f"{self.say('diloco_overlap_steps')} is not less than {steps // parts}, the steps between two "
                "exchanges (--diloco-inner-steps / --diloco-fragments); use fewer"
            )
        if self.diloco_min_replicas > sites:
            yield f"{self.say('diloco_min_replicas')} is more than {self.say('diloco_replicas')}; use at most {sites}"
        numbers = [number for number, _ in self.read_data_sites()]
        if sites > 1 and (not all(0 <= n < sites for n in numbers) or len(set(numbers)) < len(numbers)):
            yield (
                f"{self.say('data_site')} is not SITE:PREFIX for different sites; give the number of a site, 0 to "
                f"{sites - 1}, a colon, and the prefix of its dataset"
            )
        if self.datacenter_id is None:
            return
        if self.datacenter_id >= sites:
            yield f"{self.say('datacenter_id')} is none of the {sites} sites of --diloco-replicas, counted from 0"
        is_own = self.diloco_backend == "own"
        if not is_own and self.diloco_exchange_dtype != "fp32":
            yield f"{self.say('diloco_backend')} sums in float32; leave {self.say('diloco_exchange_dtype')} out"
        for name in ("diloco_address", *(["diloco_key_file"] if is_own else [])):
            if getattr(self, name) is None:
                yield f"--datacenter-id needs {self.say(name).split()[0]}: sites of their own meet by it"
        if self.diloco_address is not None and split_addresses(self.diloco_address) is None:
            yield (
                f"{self.say('diloco_address')} is not HOST:PORT; give a name or address and a port from 1 to 65535, "
                "for several nodes separated by commas"
            )


def read_topology(path: str) -> list[list[str]]:
    """The hosts of each site, line by line of --site-topology. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--site-topology {path} cannot be read ({error}); give a file that names a site's hosts in each line"
        ) from error
    sites = [hosts for line in lines if (hosts := line.partition("#")[0].split())]
    if not sites:
        raise ConfigError(f"--site-topology {path} names no host; write the names of a site's hosts in each line")
    return sites


def split_addresses(text: str) -> list[tuple[str, int]] | None:
    """(host, port) of each of `HOST:PORT,HOST:PORT`; None for another text."""
    found = []
    for part in text.split(","):
        host, colon, port = part.strip().rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            return None
        found.append((host.strip("[]"), int(port)))
    return found
