"""The node: container runtime, kubelet, service proxy and the pods' network."""

from __future__ import annotations

import json

from e2e.cluster.layout import DNS_ADDRESS, NODE, NODE_ADDRESS, POD_NETWORK, Layout, Program

KUBELET_FOLDER = "/var/lib/kubelet"
"""Its device-plugin folder cannot be configured, so the run's own folder is mounted here."""
PAUSE_IMAGE = "localhost/pause:1"
CNI_PLUGINS = "/usr/lib/cni"


def write_files(layout: Layout) -> None:
    """Writes the configuration of all three programs and of the pods' network."""
    network = layout.run / "cni"
    network.mkdir()
    (network / "10-pods.conflist").write_text(json.dumps(pod_network(layout)))
    (layout.run / "containerd.toml").write_text(containerd_config(layout))
    (layout.run / "pod-resolv.conf").write_text("nameserver 127.0.0.1\n")
    (layout.run / "kubelet.json").write_text(json.dumps(kubelet_config(layout)))
    (layout.run / "proxy.json").write_text(json.dumps(proxy_config(layout)))


def pod_network(layout: Layout) -> dict[str, object]:
    """One bridge. No masquerading: nothing leaves the namespace, and policies must see the pods' own addresses."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": f"{layout.run}/addresses",
            "ranges": [[{"subnet": POD_NETWORK}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}


def containerd_config(layout: Layout) -> str:
    """Root in a container may lack the right to lower a process's OOM score; without the restriction no pod starts."""
    return f"""\
version = 3
root = "{layout.containerd}"
state = "{layout.run}/containerd"
[grpc]
  address = "{layout.containerd_socket}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{CNI_PLUGINS}"]
    conf_dir = "{layout.run}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


def kubelet_config(layout: Layout) -> dict[str, object]:
    """Open to everyone in the namespace; runs on control groups v1 and v2, with swap, on a full disk.

    Secrets reach pods, and containers that ended start again, within seconds instead of minutes.
    """
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.name}",
        "cgroupsPerQOS": True,
        "failSwapOn": False,
        "failCgroupV1": False,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{layout.run}/pod-resolv.conf",
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "volumePluginDir": f"{layout.run}/volume-plugins",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "syncFrequency": "3s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
        "nodeStatusUpdateFrequency": "5s",
    }


def proxy_config(layout: Layout) -> dict[str, object]:
    """Follows pods at once instead of within a second: drains are short in tests.

    Leaves the kernel's connection tracking as it is: those settings are the whole machine's.
    """
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "iptables": {"minSyncPeriod": "100ms"},
        "clientConnection": {"kubeconfig": str(layout.kubeconfig("proxy"))},
        "clusterCIDR": POD_NETWORK,
        "hostnameOverride": NODE,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }


def containerd(layout: Layout) -> Program:
    """The container runtime."""
    return Program.of("containerd", "--config", f"{layout.run}/containerd.toml")


def kubelet(layout: Layout) -> Program:
    """Registers the node by itself."""
    return Program.of(
        "kubelet",
        f"--config={layout.run}/kubelet.json",
        f"--kubeconfig={layout.kubeconfig('kubelet')}",
        f"--root-dir={KUBELET_FOLDER}",
        f"--cert-dir={KUBELET_FOLDER}/pki",
        f"--hostname-override={NODE}",
        f"--node-ip={NODE_ADDRESS}",
    )


def proxy(layout: Layout) -> Program:
    """Makes Services reachable."""
    return Program.of("kube-proxy", f"--config={layout.run}/proxy.json")
