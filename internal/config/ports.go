package config

import (
	"errors"
	"fmt"
	"net"
)

// FreePorts returns n distinct TCP ports that were free on 127.0.0.1 a moment ago.
// All are held open until the last is found, so they differ; nothing reserves them
// afterwards, and a caller that can pass a listener on should do that instead.
func FreePorts(n int) ([]int, error) {
	ports := make([]int, 0, max(n, 0))
	held := make([]net.Listener, 0, max(n, 0))
	var err error
	for range n {
		var l net.Listener
		if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			err = fmt.Errorf("find %d free ports: %w", n, err)
			break
		}
		held = append(held, l)
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	for _, l := range held {
		err = errors.Join(err, l.Close())
	}
	if err != nil {
		return nil, err
	}
	return ports, nil
}
