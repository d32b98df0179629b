package router

import "github.com/baton-pd/baton/internal/room"

// noWorker stands for the leg of an attempt that has one leg only.
var noWorker = &worker{side: room.SideSender, name: "none", kick: make(chan struct{}, 1), freed: func() {}}
