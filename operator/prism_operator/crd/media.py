"""What requests may bring: pictures, clips, and links to either."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from prism_operator.crd.base import Model, Quantity
from prism_operator.crd.network import Port

_LABEL = "[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
Host = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=rf"^(\*|(\*\.)?{_LABEL}(\.{_LABEL})*|[0-9a-f.]*:[0-9a-f:.]*)$"),
]
"""As in the engine's `fetch.hosts`: a name, its subdomains, an address, or all."""
Network = Annotated[str, Field(min_length=3, max_length=49, pattern=r"^[0-9a-fA-F:.]+/[0-9]{1,3}$")]
"""A network as in an ipBlock of a NetworkPolicy: `10.8.0.0/16`."""


class VideoSpec(Model):
    """Limits of clips in requests."""

    max_tokens: Annotated[int, Field(ge=16, le=65536)] = Field(
        default=12288,
        description="of one clip; a clip above it is shown with fewer frames, then with smaller ones. The encoder's"
        " memory and the page plan follow it",
    )
    max_seconds: Annotated[int, Field(ge=1, le=86400)] = Field(default=3600, description="longest clip")


class LinksSpec(Model):
    """Pictures and clips that requests name by link: engines fetch them from these hosts and from no others."""

    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "quantity(self.maxSize).compareTo(quantity(self.maxRequestSize)) <= 0",
            "maxRequestSize must hold one link: at least maxSize",
        ),
    )
    hosts: Annotated[list[Host], Field(min_length=1, max_length=64)] = Field(
        description="that links may name: example.org, *.example.org (its subdomains), an address, or * for all"
    )
    allow_http: bool = Field(
        default=False, description="http links too; anybody on the way can read and change what they bring"
    )
    ports: Annotated[list[Port], Field(max_length=16)] = Field(
        default_factory=list, description="that links may name; empty: 443, and 80 with allowHttp"
    )
    private_networks: Annotated[list[Network], Field(max_length=16)] = Field(
        default_factory=list,
        description="that links may lead into although they are private, such as an object store's: 10.8.0.0/16",
    )
    max_size: Quantity = Field(default="64Mi", description="of what one link leads to; maxItemSize holds too")
    max_request_size: Quantity = Field(default="128Mi", description="of what all links of one request lead to")
    timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=30,
        description="for one link, from its name to the last byte; engine.requestTimeoutSeconds must hold it",
    )
    cache_size: Quantity = Field(default="256Mi", description="of what links led to, kept in host memory; 0 keeps none")

    @field_validator("private_networks")
    @classmethod
    def _are_networks(cls, networks: list[str]) -> list[str]:
        for network in networks:
            ip_network(network)  # its ValueError says what is wrong with it
        return networks

    @property
    def open_ports(self) -> list[int]:
        """Of the hosts, as the engine reads them."""
        return sorted(set(self.ports)) or ([80, 443] if self.allow_http else [443])


class MediaSpec(Model):
    """Limits of pictures and clips in requests."""

    max_items: Annotated[int, Field(ge=0, le=4096)] = Field(default=64, description="pictures and clips in one request")
    max_item_size: Quantity = Field(default="64Mi", description="encoded bytes of one picture or clip")
    max_image_tokens: Annotated[int, Field(ge=16, le=16384)] = Field(
        default=4096, description="larger pictures are scaled down to it"
    )
    cache_size: Quantity = Field(default="1Gi", description="decoded pictures and clips kept in host memory")
    video: VideoSpec | None = Field(default=None, description="limits of clips; absent: those of the engine's version")
    links: LinksSpec | None = Field(
        default=None, description="media by link; absent: off. The policy lets engines out as far as that needs"
    )
