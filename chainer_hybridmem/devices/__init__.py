from chainer_hybridmem.devices.host import HostDevice
def open_device(spec, limit_bytes, link_bandwidth, swap_dir):
    return HostDevice(limit_bytes, link_bandwidth, swap_dir)
