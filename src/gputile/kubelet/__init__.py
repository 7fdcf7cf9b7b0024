"""The kubelet: its device-plugin API, and what it says of who holds which devices.

Room:  `protobuf` and `messages` (the wire), `plugin` (one gRPC server per resource, registered again whenever the
       kubelet starts), `allocation` (its checkpoint and its podresources socket), `runtime` (the CRI socket beside it).
       Nothing here decides which card is whose.
Door:  `plugin.Door`, `holding.read_checkpoint`, `runtime.ask`, `runtime.running`.
"""
