"""What tests are written with: networks, toys, programs, hostile devices."""

import pytest

pytest.register_assert_rewrite(f'{__name__}.device_suite')  # its checks are shown whole
