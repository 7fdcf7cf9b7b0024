"""Client and server of the kubelet's APIs, and a client of the container runtime beside it.

`device_plugin` serves one resource over the device-plugin API, `checkpoint` reads the device manager's checkpoint file,
`cri` queries the container runtime; `messages` and `protobuf` are their wire format. Nothing here decides which
container gets which card.
"""
