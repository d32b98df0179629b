package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// namespace is a network namespace without a name. f keeps it alive.
type namespace struct{ f *os.File }

// ownNamespace is the one that this process runs in. It is opened once, before any thread has
// left it: the first thread, for which /proc/self speaks, may be one of those that do.
var ownNamespace = sync.OnceValues(func() (*os.File, error) { return os.Open("/proc/self/ns/net") })

// newNamespace makes an empty one; its loopback device is up.
func newNamespace() (*namespace, error) {
	n := &namespace{}
	err := onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		var err error
		if n.f, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		return linkUp("lo", 0)
	})
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// onOwnThread runs f, which may change the thread's namespace, and changes it back. A thread that can
// not go back ends with its goroutine, so that nothing else ever runs on it.
func onOwnThread(f func() error) error {
	home, err := ownNamespace()
	if err != nil {
		return err
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := f()
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
			if err == nil { // else f's error says what is missing, and nothing is lost but this thread
				err = fmt.Errorf("return to the own network namespace: %w", back)
			}
			result <- err
			return
		}
		runtime.UnlockOSThread()
		result <- err
	}()
	return <-result
}

// do runs f on a thread inside the namespace.
func (n *namespace) do(f func() error) error {
	return onOwnThread(func() error {
		if err := unix.Setns(int(n.f.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter a network namespace: %w", err)
		}
		return f()
	})
}

func (n *namespace) close() error {
	if n == nil || n.f == nil {
		return nil
	}
	return n.f.Close()
}

// control runs f with a socket for ioctls of the thread's namespace.
func control(f func(fd int) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return f(fd)
}

// linkUp starts a device; more are flags beside IFF_UP.
func linkUp(name string, more uint16) error {
	return control(func(fd int) error {
		r, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		r.SetUint16(unix.IFF_UP | more)
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r); err != nil {
			return fmt.Errorf("start device %s: %w", name, err)
		}
		return nil
	})
}

// linkMTU sets the largest packet.
func linkMTU(name string, bytes uint32) error {
	return control(func(fd int) error {
		r, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		r.SetUint32(bytes)
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFMTU, r); err != nil {
			return fmt.Errorf("set MTU of %s: %w", name, err)
		}
		return nil
	})
}

// linkAddress gives a device an address of a /24.
func linkAddress(name string, addr [4]byte) error {
	return control(func(fd int) error {
		for _, set := range []struct {
			request uint
			value   []byte
		}{{unix.SIOCSIFADDR, addr[:]}, {unix.SIOCSIFNETMASK, []byte{255, 255, 255, 0}}} {
			r, err := unix.NewIfreq(name)
			if err != nil {
				return err
			}
			if err := r.SetInet4Addr(set.value); err != nil {
				return err
			}
			if err := unix.IoctlIfreq(fd, set.request, r); err != nil {
				return fmt.Errorf("address of %s: %w", name, err)
			}
		}
		return nil
	})
}

// wholeChecksums makes the kernel compute checksums itself instead of leaving them to the device, which
// here is a program that reads frames. Without them it does not leave segmentation to the device either.
func wholeChecksums(name string) error {
	const setTxChecksum = 0x17 // ETHTOOL_STXCSUM
	value := struct{ cmd, data uint32 }{setTxChecksum, 0}
	var r struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		rest [16]byte
	}
	copy(r.name[:unix.IFNAMSIZ-1], name)
	r.data = unsafe.Pointer(&value)
	return control(func(fd int) error {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&r)))
		runtime.KeepAlive(&value)
		if errno != 0 {
			return fmt.Errorf("switch off checksum offload of %s: %w", name, errno)
		}
		return nil
	})
}

// attribute is one of netlink's, with its content padded to 4 bytes.
func attribute(kind uint16, content ...[]byte) []byte {
	out := make([]byte, 4)
	for _, c := range content {
		out = append(out, c...)
	}
	binary.NativeEndian.PutUint16(out, uint16(len(out)))
	binary.NativeEndian.PutUint16(out[2:], kind)
	return append(out, make([]byte, -len(out)&3)...)
}

func cString(s string) []byte { return append([]byte(s), 0) }

// addPair makes a veth pair: here is its end in the thread's namespace, there the one in the other.
func addPair(here, there string, other *namespace) error {
	const infoPeer = 1 // VETH_INFO_PEER
	none := make([]byte, unix.SizeofIfInfomsg)
	fd := binary.NativeEndian.AppendUint32(nil, uint32(other.f.Fd()))
	body := append([]byte(nil), none...)
	body = append(body, attribute(unix.IFLA_IFNAME, cString(here))...)
	body = append(body, attribute(unix.IFLA_LINKINFO,
		attribute(unix.IFLA_INFO_KIND, cString("veth")),
		attribute(unix.IFLA_INFO_DATA, attribute(infoPeer, none, attribute(unix.IFLA_IFNAME, cString(there)), attribute(unix.IFLA_NET_NS_FD, fd))))...)
	msg := make([]byte, unix.SizeofNlMsghdr, unix.SizeofNlMsghdr+len(body))
	binary.NativeEndian.PutUint32(msg, uint32(len(msg)+len(body)))
	binary.NativeEndian.PutUint16(msg[4:], unix.RTM_NEWLINK)
	binary.NativeEndian.PutUint16(msg[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	if err := unix.Sendto(s, append(msg, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(s, answer, 0)
	if err != nil {
		return err
	}
	if n < unix.SizeofNlMsghdr+4 || binary.NativeEndian.Uint16(answer[4:]) != unix.NLMSG_ERROR {
		return errors.New("make a veth pair: the kernel's answer is not understood")
	}
	if code := int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:])); code != 0 {
		return fmt.Errorf("make a veth pair: %w", unix.Errno(-code))
	}
	return nil
}

// openDevice opens a device of the thread's namespace for raw frames with IPv4 in them.
func openDevice(name string) (*os.File, error) {
	const (
		ignoreOutgoing = 23 // PACKET_IGNORE_OUTGOING: our own frames do not come back
		// PACKET_QDISC_BYPASS: straight to the other end. The device's queue is a black hole until the
		// kernel has noticed, perhaps a second later, that the link is up.
		bypassQueue = 20
		room        = 8 << 20
	)
	dev, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	proto := uint16(unix.ETH_P_IP>>8 | unix.ETH_P_IP<<8&0xff00) // in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_PACKET, ignoreOutgoing, 1),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, bypassQueue, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, room),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: dev.Index}))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("packet socket on %s: %w", name, err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "packets of "+name), nil
}
