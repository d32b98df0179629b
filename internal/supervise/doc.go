// Package supervise runs the processes of one machine's stack as children: it
// starts them in order, restarts what ends or hangs, and makes sure that none
// outlives it, however it ends itself.
//
// # Guarantees
//
//   - A child that exits is started again after an exponential backoff, which falls
//     back to its least value once a life was long enough.
//   - A child that stops answering its health address for [Config.StuckAfter] (hung, or
//     stopped by a signal) is killed with SIGKILL and restarted. A dead process
//     stores nothing any more, so this also fences it.
//   - When [Supervisor.Run] returns, every child has been waited for: SIGTERM first,
//     SIGKILL to its process group after [Config.Grace].
//   - When the supervisor's process dies without a word (kill -9), the kernel kills
//     the children (PR_SET_PDEATHSIG), and a lifeline, a pipe whose other end died with
//     the parent, tells those that call [WatchParent].
//
// # The child's side
//
// A child calls [WatchParent] first and [Ready] once it serves. Both do nothing if
// the process was not started by a supervisor.
//
// # What it does not promise
//
// Grandchildren are killed only as members of the child's process group.
package supervise
