"""Hold a stand-in for torchvision, in a folder that is put on the import path where only a part of it is installed."""
