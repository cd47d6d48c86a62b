"""Convolutions: fused with pool and ReLU, by Winograd's method, and over volumes with stride 2."""
