"""Readers and writers of file formats: IDX and TFRecord."""
