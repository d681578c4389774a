"""What tests are written with: networks, toys, programs, hostile devices."""
