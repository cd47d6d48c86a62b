"""A JPEG decoder for parts of an image: a guest behind libjpeg-turbo, and equal to it to the bit."""
