"""Tests of `podium.certify`."""
