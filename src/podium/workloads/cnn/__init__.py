"""Image classification: ResNet, ResNeXt, EfficientNet."""
