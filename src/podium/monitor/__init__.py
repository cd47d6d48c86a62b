"""A running training seen from elsewhere: another terminal, a browser, another host. It only reads the run folder."""
