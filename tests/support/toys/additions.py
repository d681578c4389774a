"""What is added to a profile: copies that slow others down."""

from __future__ import annotations

import dataclasses

from chainer_hybridmem.planning.records.profile import Profile


def with_shares(profile: Profile, out: float, back: float, duplex: float) -> Profile:
    """The profile with copies that slow each other and compute down."""
    link = dataclasses.replace(
        profile.link,
        d2h_compute_share=out,
        h2d_compute_share=back,
        duplex_share=duplex,
    )
    return dataclasses.replace(profile, link=link)
