"""How a training scales: from times measured on some devices to those on more."""
