# SPDX-License-Identifier: Apache-2.0
"""Several sites: equal blocks of a job's ranks as separate jobs, and where their equal ranks meet."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import sys
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store

from megatron.core.config_base import get_settings
from megatron.core.errors import ConfigError, TemporaryError
from megatron.core.many_sites.exchange import SiteExchange
from megatron.core.many_sites.link import digest_of
from megatron.core.many_sites.outer_optimizer import (
    OuterOptimizer,
    OuterSettings,
)
from megatron.core.many_sites.shares import count_longest_message, is_exchanging
from megatron.core.optimizer.megatron_optimizer import MegatronOptimizer
from megatron.training.config.container import RunConfig
from megatron.training.config.sites import SitesConfig, read_topology, split_addresses
from megatron.training.launch.launch import Launch

_LEAST_KEY_BYTES = 16
_OF_ONE_SITE = ("datacenter_id", "data_site", "diloco_address", "diloco_key_file", "diloco_timeout_seconds")


@dataclasses.dataclass(frozen=True)
class MeetingPoint:
    """Store that the ranks of all sites of a job share."""

    store: Store
    host: str
    """Address of this machine, for the others."""


def take_site(config: RunConfig, launch: Launch) -> Launch:
    """Make each block of ranks a separate job; returns this process's place in its block.

    From here on the settings describe this site as a job. Except for the first, which is the only one that
    prints, a site keeps its checkpoints and metrics in a separate directory. Raises ConfigError where a program has
    joined the ranks itself, or the host is at another site by --site-topology.
    """
    _check_place(config, launch)
    sites = config.sites.sites_of_job
    if sites == 1:
        _use_near_data(config)
        return launch
    if launch.world_size != config.world_size:
        raise ConfigError(
            f"--diloco-replicas {sites} divides the {config.world_size} processes of WORLD_SIZE, and "
            f"{launch.world_size} were started; start as many"
        )
    size = config.world_size // sites
    site = launch.rank // size
    # The object itself: the recipe and the hooks have it already.
    object.__setattr__(config, "world_size", size)
    config.sites.datacenter_id = site
    _use_near_data(config)
    if site > 0:
        _use_own_directories(config, site)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    rank = launch.rank % size
    leads_host = launch.is_first_of_host or rank == 0
    return dataclasses.replace(launch, rank=rank, world_size=size, leads_host=leads_host, whole=launch)


def _check_place(config: RunConfig, launch: Launch) -> None:
    path = config.sites.site_topology
    if path is None:
        return
    sites, site = read_topology(path), config.sites.datacenter_id
    copies = config.ddp.num_distributed_optimizer_instances
    if config.sites.diloco_replicas == 1 and copies != len(sites):
        raise ConfigError(
            f"--site-topology {path} has {len(sites)} sites, and --num-distributed-optimizer-instances is {copies}; "
            f"give {len(sites)}"
        )
    place = launch.rank * len(sites) // launch.world_size if site is None else site
    own = socket.gethostname()
    if not {own, own.partition(".")[0]} & set(sites[place]):
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size} belongs to site {place}, whose hosts are "
            f"{', '.join(sites[place])} in --site-topology {path}, and runs on {own}; start the nodes in the order of "
            "the file, as many processes at each site"
        )


def _use_near_data(config: RunConfig) -> None:
    for site, prefix in config.sites.read_data_sites():
        if site == config.sites.datacenter_id:
            config.data.data_path = [prefix]


def _use_own_directories(config: RunConfig, site: int) -> None:
    checkpoint, logger, own = config.checkpoint, config.logger, f"site_{site}"
    if checkpoint.load is not None and (checkpoint.load == checkpoint.save or (Path(checkpoint.load) / own).is_dir()):
        checkpoint.load = str(Path(checkpoint.load) / own)
    for group, name in (
        (checkpoint, "save"), (checkpoint, "non_persistent_global_ckpt_dir"), (logger, "metrics_dir"),
        (logger, "tensorboard_dir"),
    ):  # fmt: skip
        if (path := getattr(group, name)) is not None:
            setattr(group, name, str(Path(path) / own))


def find_meeting_point(launch: Launch, store: Store) -> MeetingPoint:
    """The meeting point of the sites of one job. store: of all ranks."""
    whole = launch.whole
    assert whole is not None and whole.master_addr is not None
    return MeetingPoint(PrefixStore("sites", store), _find_own_address(whole.master_addr, whole.master_port or 1))


def _find_own_address(host: str, port: int) -> str:
    """Address of this machine that `host` reaches."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def build_outer_optimizer(
    config: RunConfig, launch: Launch, optimizer: MegatronOptimizer, meeting_point: MeetingPoint | None
) -> OuterOptimizer | None:
    """The outer steps of a run on several sites, with connections to the others; None for one site. Raises ConfigError
    and TemporaryError."""
    sites, site = config.sites, config.sites.datacenter_id
    if sites.diloco_replicas == 1 or site is None:
        return None
    settings = OuterSettings(
        sites=sites.diloco_replicas,
        inner_steps=sites.diloco_inner_steps,
        fragments=sites.diloco_fragments,
        overlap_steps=sites.diloco_overlap_steps,
        outer_lr=sites.diloco_outer_lr,
        outer_momentum=sites.diloco_outer_momentum,
        mixing=sites.diloco_mixing,
        form=sites.diloco_exchange_dtype,
        min_replicas=sites.diloco_min_replicas,
        timeout_seconds=sites.diloco_timeout_seconds,
    )
    if sites.diloco_backend == "torchft":
        from megatron.core.many_sites.torchft_quorum import TorchftOuterOptimizer

        addresses = split_addresses(sites.diloco_address or "")
        assert addresses is not None, "checked with the settings"
        (host, port), *_ = addresses
        store = launch.master_addr or _find_own_address(host, port), launch.master_port
        return TorchftOuterOptimizer(optimizer, settings, site, f"http://{host}:{port}", store)
    exchange = None
    if is_exchanging(optimizer):
        key = secrets.token_bytes(32) if meeting_point is not None else read_key(sites)
        digest = _digest(config, optimizer)
        most = count_longest_message(optimizer)
        if meeting_point is None:
            exchange = SiteExchange(site, settings.sites, key, most=most, settings=digest)
            _meet_at_address(exchange, sites, launch)
        else:
            exchange = _meet_in_job(meeting_point, site, launch.rank, settings, key, most, digest)
    return OuterOptimizer(optimizer, settings, exchange, leads=site == 0)


def read_key(sites: SitesConfig) -> bytes:
    """The key of --diloco-key-file. Raises ConfigError."""
    path = sites.diloco_key_file
    assert path is not None
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--diloco-key-file {path} cannot be read ({error.strerror}); give a file") from error
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(
            f"--diloco-key-file {path} holds {len(key)} bytes, fewer than {_LEAST_KEY_BYTES}; make one with "
            "`openssl rand -hex 32`"
        )
    return key


def _meet_at_address(exchange: SiteExchange, sites: SitesConfig, launch: Launch) -> None:
    addresses = split_addresses(sites.diloco_address or "")
    assert addresses is not None, "checked with the settings"
    node, place = divmod(launch.rank, launch.world_size // len(addresses))
    host, port = addresses[node]
    if exchange.site == 0:
        exchange.listen(host, port + place)
    else:
        exchange.call(host, port + place)


def _meet_in_job(
    point: MeetingPoint, site: int, rank: int, settings: OuterSettings, key: bytes, most: int, digest: str
) -> SiteExchange:
    if site == 0:
        exchange = SiteExchange(site, settings.sites, key, most=most, settings=digest)
        exchange.meeting_point = point
        port = exchange.listen(point.host, 0)
        point.store.set(str(rank), f"{point.host} {port} {key.hex()}")
        return exchange
    try:
        point.store.wait([str(rank)], timedelta(seconds=settings.timeout_seconds))
    except RuntimeError as error:
        raise TemporaryError(
            f"rank {rank} of the first site has not come within --diloco-timeout-seconds {settings.timeout_seconds:g}"
        ) from error
    host, text, secret = point.store.get(str(rank)).decode().split()
    exchange = SiteExchange(site, settings.sites, bytes.fromhex(secret), most=most, settings=digest)
    exchange.call(host, int(text))
    return exchange


def _digest(config: RunConfig, optimizer: MegatronOptimizer) -> str:
    """Of what two sites must have the same: this rank's weights, and the settings of the exchange."""
    names = {state_member.name: list(state_member.param.shape) for s in optimizer.states for state_member in s.members}
    settings = {n: getattr(config.sites, n) for n in get_settings(SitesConfig) if n not in _OF_ONE_SITE}
    return digest_of({"weights": names, "settings": settings})
