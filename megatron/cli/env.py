# SPDX-License-Identifier: Apache-2.0
"""The environment variables of a training job on a network, each with its reason.

    python tools/env.py --network infiniband            NVLink inside of the nodes, InfiniBand between them
    python tools/env.py --network efa --format docker
    eval "$(python tools/env.py --network ethernet --interface eth0 --format shell)"

Without --network it looks at this machine. What a variable says already is kept by `--format shell`. Sources: NCCL's
documentation of its environment variables, torch's of TORCH_NCCL_..., and the plug-in aws-ofi-nccl's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from megatron.core.errors import ConfigError, command_line
from megatron.training.flags.argument import ProgramParser

Network = Literal["nvlink", "infiniband", "efa", "ethernet"]
NETWORKS: dict[Network, str] = {
    "nvlink": "one node whose GPUs are connected by NVLink",
    "infiniband": "nodes connected by InfiniBand, or by RoCE",
    "efa": "nodes connected by Amazon's Elastic Fabric Adapter",
    "ethernet": "nodes connected by Ethernet alone",
}


class Variable(NamedTuple):
    """An environment variable, its value, and why."""

    name: str
    value: str
    reason: str


def list_variables(network: Network, interface: str | None = None, adapters: str | None = None) -> Iterator[Variable]:
    """The variables of a job on this network.

    interface: name of the network interface of the nodes' addresses. adapters: of the InfiniBand adapters for GPUs.
    """
    yield Variable("OMP_NUM_THREADS", "1", "as many processes as GPUs share the cores; each would take all of them")
    yield Variable("NCCL_DEBUG", "WARN", "says why a connection fails; INFO shows which network and rings are used")
    if network == "nvlink":
        yield Variable("NCCL_P2P_LEVEL", "NVL", "GPUs read each other's memory only over NVLink, never over the host")
        return
    # A name after ^ is one that must not be used.
    addresses = interface or "^lo,docker,veth"
    yield Variable("NCCL_SOCKET_IFNAME", addresses, "its first connections: not over a container's bridge")
    if interface is not None:
        yield Variable("GLOO_SOCKET_IFNAME", interface, "the same for gloo, which takes a name alone")
    if network == "infiniband":
        if adapters is not None:
            yield Variable("NCCL_IB_HCA", adapters, "the adapters beside the GPUs, and not one for storage")
        yield Variable("NCCL_IB_TIMEOUT", "22", "4.096 us x 2^22, some 17 s: a link may come back")
        yield Variable("NCCL_IB_RETRY_CNT", "7", "the most that InfiniBand allows")
        yield Variable(
            "NCCL_CROSS_NIC", "0", "rings stay on one rail; 2 lets NCCL choose, where all switches are connected"
        )
    elif network == "efa":
        yield Variable("FI_PROVIDER", "efa", "libfabric would fall back to TCP in silence; now it fails instead")
        yield Variable("NCCL_NET", "AWS Libfabric", "NCCL fails where it does not find the plug-in aws-ofi-nccl")
        yield Variable(
            "NCCL_SOCKET_IFNAME", interface or "^lo,docker,veth", "first connections over the instance's address"
        )
    else:
        yield Variable("NCCL_IB_DISABLE", "1", "there is no InfiniBand: nothing is looked for, and nothing half found")
        yield Variable("NCCL_SOCKET_NTHREADS", "4", "several threads for each connection, which one alone cannot fill")
        yield Variable("NCCL_NSOCKS_PERTHREAD", "4", "several sockets for each thread; the product is at most 64")


def find_network() -> Network:
    """Of this machine, by its devices."""
    adapters = list(Path("/sys/class/infiniband").glob("*"))
    if any(adapter.name.startswith(("efa", "rdmap")) for adapter in adapters):
        return "efa"
    return "infiniband" if adapters else "ethernet"


@command_line
def main() -> int:
    """Print the variables."""
    parser = ProgramParser(__doc__)
    parser.add_argument("--network", choices=NETWORKS, help="; ".join(f"{k}: {v}" for k, v in NETWORKS.items()))
    parser.add_argument("--interface", metavar="NAME", help="network interface of the nodes' addresses, such as eth0")
    parser.add_argument("--adapters", metavar="NAMES", help="InfiniBand adapters of the GPUs, such as mlx5_0,mlx5_1")
    parser.add_argument(
        "--format", choices=("text", "shell", "docker", "json"), default="text",
        help="with reasons; export lines for eval; lines for docker run --env-file; JSON",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.interface is not None and not Path("/sys/class/net", arguments.interface).exists():
        found = sorted(path.name for path in Path("/sys/class/net").glob("*"))
        # The variables may be for other machines: only this one's can be looked at.
        if arguments.network is None:
            raise ConfigError(f"--interface {arguments.interface} does not exist here; there are {', '.join(found)}")
    network = arguments.network or find_network()
    variables = list(list_variables(network, arguments.interface, arguments.adapters))
    if arguments.format == "json":
        print(json.dumps([variable._asdict() for variable in variables], indent=2))
    elif arguments.format == "text":
        print(f"# {network}: {NETWORKS[network]}")
        width = max(len(f"{variable.name}={variable.value}") for variable in variables)
        for name, value, reason in variables:
            print(f"{f'{name}={value}':<{width}}  # {reason}")
    else:
        for name, value, _ in variables:
            # What the site has set already knows better.
            print(f"{name}={value}" if arguments.format == "docker" else f'export {name}="${{{name}:-{value}}}"')
    return 0
